"""Requests, scheduling, sampling and the step loop behind a message interface."""
