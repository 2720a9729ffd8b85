"""Pure functions over tensors: rewards to advantages, log-probabilities to losses, tokens to one number.

Nothing here knows of rows, ranks or services. A function's keyword-only parameters are its settings.
"""
