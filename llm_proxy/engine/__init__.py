"""The engine host: one process beside each inference engine, which serves EngineService for it.

The host owns one engine, chosen by configuration (adapters/), and is the only thing that the farm sees of it.
"""
