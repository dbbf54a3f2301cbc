from trainer.data.order import *
