"""Checkpoints that resume a run, copies and pickles."""
