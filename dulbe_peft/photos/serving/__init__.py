"""Serve a page to try a learner: classify photographs, correct predictions, add classes, undo and download."""

from dulbe_peft.photos.serving.app import App as App
from dulbe_peft.photos.serving.server import make_server as make_server
