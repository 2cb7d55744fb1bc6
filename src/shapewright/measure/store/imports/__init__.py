"""Import of measurements from other collectors, and from exports, into a store."""
