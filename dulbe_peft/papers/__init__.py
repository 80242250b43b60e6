"""Methods from other papers. Each file holds one paper's strategy, its classifier, or both."""
