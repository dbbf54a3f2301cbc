from trainer.data import *
