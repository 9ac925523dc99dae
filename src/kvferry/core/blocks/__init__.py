"""What names and describes blocks of KV: hashes, layouts, and which ranks have which heads."""
