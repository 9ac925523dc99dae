"""Stand-ins for the driver and its tools, with which `KVFERRY_GPU=fake make gpu` runs on a machine without a GPU."""
