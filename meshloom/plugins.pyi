from trainer.plugins import *
