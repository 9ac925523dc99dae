"""Commands that send requests like any client: `ask`, `chat` and `bench`. `stream` reads an answer while it arrives."""
