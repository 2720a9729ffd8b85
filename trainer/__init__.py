"""trainer: leases batches, learns, publishes weights."""
