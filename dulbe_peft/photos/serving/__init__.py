"""A page in the browser to try a learner: drop photographs, correct answers, add classes, undo, download."""

from dulbe_peft.photos.serving.app import App as App
from dulbe_peft.photos.serving.server import make_server as make_server
