import { showControls } from "./controls.js";
import { listenToKeys } from "./keys.js";
import { startLiveUpdates } from "./live.js";
import { showThemeSwitch } from "./themes.js";
import { startTimeUpdates } from "./times.js";

showThemeSwitch();
showControls();
listenToKeys();
startTimeUpdates();
startLiveUpdates();
