"""What configures kvferry: bounds, options, sizes, environment variables, and `--kv-transfer-config`."""
