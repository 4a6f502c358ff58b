"""``moonstep demo``: what the connector does for a real model in a real engine on this machine.

``plan`` fixes what is measured, ``run`` leads through it. ``process`` keeps one engine in a child
process and ``child`` is that process: it sends ``prompts`` through a ``session`` and reads the
connector with a ``probe``. ``figures`` judges what came back, ``report`` shows it.
"""
