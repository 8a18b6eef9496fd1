"""What rows say of layouts that no row names: batches, equal values, leaves across steps, sharded dims."""
