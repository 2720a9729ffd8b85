"""What runs under the sandbox's own Python, beside or around a program. The standard library alone, of Python 3.9+."""
