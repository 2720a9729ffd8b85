"""One front door to every engine of a policy; `llm_proxy.engine` is the engine host."""
