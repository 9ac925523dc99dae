"""Configuration of kvferry: bounds, options, sizes, environment variables, and `--kv-transfer-config`."""
