"""DCP's prototypes: labels, update, figures, and the number of classes."""
