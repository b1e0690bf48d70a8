"""Code that depends on the machine: processes, devices, signals, locks, storage. Import its modules individually."""
