"""Scores finished episodes, routed by domain. An infrastructure failure is never a reward of 0."""
