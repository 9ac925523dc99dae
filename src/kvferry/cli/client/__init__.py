"""Commands that send requests as any client does: `ask`, `chat` and `bench`, on `stream`, the answer as it comes."""
