"""The machine: processes, devices, signals, locks, storage. Import its modules individually."""
