"""Methods and classifiers side by side on the same streams: what to run, running it, and the table."""
