from trainer.data.mixture import *
