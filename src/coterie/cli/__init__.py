"""The command line: one file per verb, loaded only when its verb is asked for. Nothing here computes."""
