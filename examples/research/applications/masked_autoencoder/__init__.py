"""Masked autoencoders, pre-trained with and without Deep Companion Learning."""
