"""What touches the machine: placing host arrays on devices, signals, locks. Its modules are imported one by one."""
