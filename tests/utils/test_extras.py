"""The garbage collector while a command imports and loads."""

import gc

import pytest

from dulbe_peft.utils.extras import uncollected


@pytest.fixture
def thawed():
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_what_is_imported_is_set_aside_once_and_the_collector_is_left_as_it_was(thawed):
    with uncollected():
        assert not gc.isenabled() and not gc.get_freeze_count()
    frozen = gc.get_freeze_count()
    assert gc.isenabled() and frozen > 1000
    kept = [[] for _ in range(100)]
    with uncollected():
        pass
    assert gc.get_freeze_count() <= frozen and len(kept) == 100  # the garbage of a second model is collected
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_what_could_not_be_loaded_is_collected(thawed):
    with pytest.raises(OSError, match="no model"), uncollected():
        raise OSError("no model")
    assert gc.isenabled() and not gc.get_freeze_count()
