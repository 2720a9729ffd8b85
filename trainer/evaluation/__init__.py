"""Rollouts without training: every domain's held-out tasks, each played several times by one model."""
