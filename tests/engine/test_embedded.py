"""The embedded engine alone: what the contract suite does not ask of every engine."""
