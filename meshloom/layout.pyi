from trainer.layout import *
