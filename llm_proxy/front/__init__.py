"""The front door for agents that speak OpenAI's or Anthropic's HTTP: what they are answered is recorded by tokens.

`server` adapts HTTP; `openai`, `completions` and `anthropic` read and write each API; `door` asks the engines;
`sessions`, `record`, `prompts` and `replies` decide, with no socket and no clock.
"""
