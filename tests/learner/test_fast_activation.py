"""Test that tasks are trained with the fast quick GELU, and that this changes no bit of what they learn."""

from contextlib import nullcontext

import torch
from small_runs import learner_of, tasks_of
from transformers.activations import QuickGELUActivation

from dulbe_peft.training import task_trainer


def test_learner_has_the_same_bits_as_with_the_activation_of_transformers(base, digit_folders, monkeypatch):
    """Two tasks, so that the second one has a structure loss; the probe and all steps take the fast activation."""
    tasks, learned = tasks_of(digit_folders(4, 6, 3)), []
    forwards = set()
    loss = task_trainer.cross_modal_loss

    def watched(*given):
        activations = [module for module in learner.clip.modules() if type(module) is QuickGELUActivation]
        assert activations
        forwards.add(all("forward" in vars(module) for module in activations))
        return loss(*given)

    monkeypatch.setattr(task_trainer, "cross_modal_loss", watched)
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(task_trainer, "fast_quick_gelu", lambda model: nullcontext())
        learner = learner_of(base, learning_rate=1e-2, update_share=1)
        for task in tasks[:2]:
            learner.learn_task(task.train)
        learned.append({**learner.state.adapter_tensors(), **learner.memory})
        assert forwards == {fast}
        forwards.clear()
    assert all(torch.equal(tensor, learned[1][name]) for name, tensor in learned[0].items())
