"""Names and descriptions of KV blocks: hashes, layouts, and which ranks have which heads."""
