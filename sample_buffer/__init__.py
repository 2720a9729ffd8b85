"""The ledger of a run: leases episodes and batches, and bounds how much and how stale work may get."""
