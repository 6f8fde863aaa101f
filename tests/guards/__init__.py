"""Errors and warnings of the guards, which change nothing in a right script: ``--without-guards`` leaves them out."""
