"""Counters and timers that anyone may be handed; never imports what it observes."""
