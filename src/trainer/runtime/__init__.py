"""What touches the machine: several processes, devices, signals, locks. Its modules are imported one by one."""
