"""Published numbers beside ours: checks as rows of YAML, what they need from the network, and how each is measured."""
