"""Methods of other papers, one file a paper: its strategy, its classifier, or both."""
