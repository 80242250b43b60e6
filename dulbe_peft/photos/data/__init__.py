"""Images as people have them: folders, tables of labels, data sets of the Hub, splits to learn from and to test on."""
