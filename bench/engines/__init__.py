"""Engines run whole, with random weights: jitattn as their attention beside what they come with."""
