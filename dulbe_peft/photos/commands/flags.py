"""Settings of several commands, and types with the words that the help shows for their values."""

from typing import Annotated

from dulbe_peft.utils.settings import setting

File = Annotated[str, "FILE"]
Page = Annotated[str, "FILE.html"]
Folder = Annotated[str, "FOLDER"]
DATA = setting(None, "images: folder of classes, parquet files, hf:NAME")
LABELS = setting(None, "a table with path,label, or one of another program; in place of folders", metavar="FILE.csv")
NO_STORE = setting(False, "do not store or reuse features of images")
ONLY = setting(None, "file of the classes that are possible, one per line")
SUM_UP = setting(None, "CSV file of class,group: answer with groups")
OVERWRITE = setting(False, "start again; keep an existing output as NAME.old")
