"""Models of commands are loaded once: a command loads its model anew, which takes as long as a short run."""

import copy
from functools import wraps
from pathlib import Path

from wrapt import when_imported

MOST = 16  # models that are kept
KEPT = {}  # what `from_pretrained` returned, by the class, the settings and the state of the folder's files


@when_imported("transformers.modeling_utils")
def _copy_loaded_models(transformers):
    """Return a copy of the model that was loaded from the same files with the same settings before.

    Its weights are those in the file: `load_encoder` replaces the weights of what it has loaded by copies.
    """
    kind = transformers.PreTrainedModel
    load = kind.from_pretrained.__func__

    @wraps(load)
    def from_pretrained(cls, name, *more, **settings):
        if not settings.get("output_loading_info") or not Path(name).is_dir():  # only `load_encoder` asks for this
            return load(cls, name, *more, **settings)
        files = sorted((path.name, path.stat()) for path in Path(name).iterdir())
        of = tuple((file, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in files)
        key = cls, str(name), of, more, repr(sorted(settings.items()))
        if key not in KEPT:
            KEPT[key] = load(cls, name, *more, **settings)
            for oldest in list(KEPT)[:-MOST]:
                del KEPT[oldest]
        model, found = KEPT[key]
        same = {id(each): each.detach() for each in model.buffers()}
        same |= {id(each): type(each)(each.detach(), each.requires_grad) for each in model.parameters()}
        return copy.deepcopy((model, found), same)

    kind.from_pretrained = classmethod(from_pretrained)
