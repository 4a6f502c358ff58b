"""The command line: ``moonstep demo``, ``moonstep audit``, ``moonstep bench``."""
