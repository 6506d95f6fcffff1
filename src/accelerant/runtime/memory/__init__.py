"""Device memory: limits, owners, predicted and measured peaks, batch sizes that fit."""
