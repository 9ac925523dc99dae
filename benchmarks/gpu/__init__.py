"""`make gpu`: does kvferry run on this GPU, is it right, and how fast is it beside vLLM? See docs/gpu.md."""
