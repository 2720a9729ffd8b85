"""Programs that try to break out of the sandbox, as data: what each tries, and how its run has to end.

A program prints PROOF only if its act succeeded, and DENIED if that was refused.
"""

from load_tests.escapes import kernel, neighbours, reach, resources

ESCAPES = [*resources.ESCAPES, *reach.ESCAPES, *kernel.ESCAPES, *neighbours.ESCAPES]
"""Every program."""
