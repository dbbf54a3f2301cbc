from trainer.engines import *
