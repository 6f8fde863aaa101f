
from examples.distances import register

register()
