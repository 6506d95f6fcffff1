"""State of the devices: load, memory, power, temperature, peers."""
